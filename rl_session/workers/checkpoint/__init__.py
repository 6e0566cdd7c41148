"""Checkpoints: from whichever tier holds the bytes, verified before anything is applied, and replaced atomically.

A checkpoint is a directory. Tensors are in the files of torch.distributed.checkpoint (DCP); everything else is in
``manifest.json``, written last: names, shapes, the structure of the optimizer's and the scheduler's state, and the size
and SHA-256 of every file. The directory is written beside its final place and renamed into it.

What is trusted when reading: nothing that can execute. We write no pickle. DCP's ``.metadata`` file is one; it is read
once, after its checksum matched, by an unpickler that knows nothing but DCP's own plain records, and DCP is handed the
result. Tensors are read by ``torch.load(weights_only=True)``. Checksums find damage; they are no signature.

Several ranks write one directory together: each its shards, the first one the manifest. What is sharded is written as
the whole that it is, so that any number of ranks, and a plain module, can load it. Reading takes no other rank.

Of tensors only metadata is read here: bytes are reached through functions that the worker passes in, so that a tensor may
be away. Knows no policy, mode or engine.
"""

from rl_session.workers.checkpoint.loading import Checkpoint, open_checkpoint
from rl_session.workers.checkpoint.saving import save

__all__ = ["Checkpoint", "open_checkpoint", "save"]
