"""User code that a type checker must take, and must reject where a line ends with `no`. Read, never run."""

from __future__ import annotations

from typing import Any

import rl_session as rs


def loop(policy: rs.Policy, value: rs.ValueModel, batch: dict[str, Any], loss: Any) -> None:
    with policy.logprob_mode() as h:
        h.get_logprobs(batch)
        h.train(batch, loss, eval_mode=True)
        h.state_dict()
        h.train(batch, loss)  # no
        h.begin_step()  # no
        h.generate(batch)  # no
        h.load_checkpoint("x")  # no
    with policy.training_mode() as t:
        t.train(batch, loss, gbs=4)
        t.begin_step()
        t.get_logprobs(batch)
        t.load_checkpoint("x")
        t.generate(batch)  # no
        t.iter_weights()  # no
        t.get_values(batch)  # no
    with policy.refit_mode() as r:
        for bucket in r.iter_weights():
            print(bucket)
        r.get_logprobs(batch)  # no
    with policy.generation_mode() as g:
        g.generate(batch)
        g.get_logprobs(batch)
        g.train(batch, loss)  # no
    with policy.offloaded() as o:
        o.save_checkpoint("x")
        o.load_checkpoint("x")
        o.get_logprobs(batch)  # no
    with value.inference_mode() as v:
        v.get_values(batch)
        v.train(batch, loss)  # no
        v.get_logprobs(batch)  # no
    with value.training_mode() as vt:
        vt.get_values(batch)
        vt.train(batch, loss)
        vt.get_logprobs(batch)  # no


def engines(policy: rs.Policy, session: rs.Session, vllm: rs.VLLMEngine, batch: dict[str, Any]) -> None:
    handle = session.engine("vllm", vllm, device=policy.device, sleep_level=2)
    version: int = policy.refit(handle)
    policy.refit(vllm, bucket_nbytes=2**20)
    print(version, handle.version, handle.state.upper())
    with policy.generation_mode(handle) as g:
        g.generate(batch, temperature=0.0)
        g.state_dict()
        g.get_logprobs(batch)  # no
    with policy.generation_mode(vllm) as e:
        e.generate(batch)
    with handle.awake(tags=["weights"]) as awake:
        awake.generate(batch)
        awake.train(batch)  # no
    session.engine("other", object())  # no
    own = session.engine("own", rs.InProcessEngine(policy))
    own.generate(batch)


async def also(policy: rs.Policy, batch: dict[str, Any], loss: Any) -> None:
    async with policy.logprob_mode() as h:
        h.get_logprobs(batch)
        h.train(batch, loss)  # no


def own_loss(logits: Any, batch: Any, seqs: Any, tokens: Any) -> tuple[Any, dict[str, Any]]:
    return logits.sum(), {"entropy": rs.mean(1.0, 2.0), "largest": rs.max(3.0)}


def states(policy: rs.Policy, session: rs.Session, model: Any) -> None:
    policy.switch(rs.Mode.RESIDENT)
    policy.switch("resident")
    policy.switch(3)  # no
    with session.step(3):
        rs.attach(model, name="p", base="resident", session=session)
        rs.attach(model, base="device")  # no
        rs.attach(model, nam="p")  # no
        rs.OffloadConfig(release="lazy", live_gradients="refuse", host_budget=2**30)
        rs.Session(release="sometimes")  # no
    tier: rs.Tier = policy.placement[rs.Component.PARAMS]
    print(tier, policy.open_step, policy.health.upper())
    with policy.training_mode(), policy.begin_step() as step:
        step.forward_backward({}, own_loss)
        step.forward_back({}, own_loss)  # no
    try:
        policy.offload()
    except rs.ModeError as error:
        print(error.remedy.upper(), error.facts)
        print(error.advice)  # no
