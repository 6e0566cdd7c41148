"""Weights do not leave the device under a captured CUDA graph. Without CUDA: torch's wrappers, around graphs that do nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rl_session.errors import UnsupportedError
from rl_session.lifecycle import Tier
from rl_session.offload.graphs import captured_graph

World = Any
D, H = Tier.DEVICE, Tier.HOST


class Graph(torch.cuda.CUDAGraph):
    """A graph by type: without CUDA torch makes none."""

    def __new__(cls, *_: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *_: Any) -> None:
        """Nothing."""


class Runner:
    """A plain object that keeps a graph, as model code has them."""

    def __init__(self) -> None:
        self.graphs = {(8, 512): [Graph()]}


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    """A policy on a device that replays graphs."""
    made = make()
    made.device.replays_graphs = True
    made.step()
    return made


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``torch.cuda.make_graphed_callables`` itself, with the calls into CUDA taken away."""
    fakes = {"CUDAGraph": Graph, "graph_pool_handle": tuple, "synchronize": lambda: None, "Stream": object}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda.graphs, "graph_pool_handle", tuple)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: contextlib.nullcontext())
    made: Callable[..., Any] = torch.cuda.make_graphed_callables
    return made


def keep_as_attribute(module: nn.Module) -> None:
    module.graph = Graph()


def keep_in_an_object(module: nn.Module) -> None:
    module.graph = Runner()


def keep_in_a_closure(module: nn.Module) -> None:
    graph = Graph()
    module.graph = lambda: graph


@pytest.mark.parametrize("keep", [keep_as_attribute, keep_in_an_object, keep_in_a_closure])
def test_weights_stay_under_a_graph_and_leave_when_it_is_gone(world: World, keep: Callable[[nn.Module], None]) -> None:
    keep(world.module.body)
    before, state, copied = world.contents(), world.freeze(), world.device.bytes_out
    with pytest.raises(UnsupportedError, match="captured CUDA graph") as caught:
        world.to(H)
    assert "body.graph" in str(caught.value.facts)
    assert "del model.body.graph" in caught.value.remedy
    assert world.freeze() == state
    assert world.device.bytes_out == copied
    del world.module.body.graph
    world.to(H)
    assert world.device.resident_bytes == 0
    world.to(D)
    assert all(torch.equal(data, before[name]) for name, data in world.contents().items())


def test_what_torch_wraps_around_graphs_is_seen_through(world: World, capture: Callable[..., Any]) -> None:
    assert captured_graph(world.module) is None
    capture(world.module.body, (torch.ones(2, 4),))
    assert captured_graph(world.module) == "body.forward"
    with pytest.raises(UnsupportedError, match="captured CUDA graph"):
        world.to(H)
    del world.module.body.forward
    world.to(H)


def test_what_no_graph_reads_leaves(world: World) -> None:
    world.module.graph = Graph()
    world.to(D, optimizer=H)
    placement = world.engine.refresh().placement
    assert (placement["params"], placement["optimizer"]) == (D, H)


def test_a_device_that_replays_no_graphs_is_not_asked(world: World) -> None:
    world.module.graph = Graph()
    world.device.replays_graphs = False
    world.to(H)
    assert world.device.resident_bytes == 0
