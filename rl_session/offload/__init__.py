"""The offload engine: moves storages between a device and the host, all or nothing, without changing a bit.

    tensors     what a storage is, which tensors can be moved, fresh aliases of bytes
    shards      what FSDP2 keeps behind the parameters
    inventory   finding every tensor of a policy by scanning
    fingerprint whether that would find what the last scan found
    gradients   which gradients an optimizer step has consumed
    device      the device interface, CUDA, and the emulated CPU device
    host_pool   host buffers, allocated once and reused
    guard       typed errors for touching what is away
    caches      callables run when memory is released
    unit        the record of one storage
    snapshot    one look at a policy, and what is remembered of it for the next
    ledger      the books of one policy: what is where, by scanning
    transaction one move, and the way back from any point of it
    engine      brings a policy to a placement, all or nothing
    swap        other contents for the same storages, for a while
    reports     what a move says afterwards

Knows nothing of policies, modes or scopes beyond components and tiers, and nothing of the audit log: it returns facts.
"""
