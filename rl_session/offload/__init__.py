"""The offload engine: moves storages between a device and the host, all or nothing, without changing a bit.

    tensors     what a storage is, which tensors can be moved, fresh aliases of bytes
    inventory   finding every tensor of a policy by scanning
    gradients   which gradients an optimizer step has consumed
    device      the device interface, CUDA, and the emulated CPU device
    host_pool   host buffers, allocated once and reused
    guard       typed errors for touching what is away
    caches      callables run when memory is released
    engine      transactional moves over all of these

Knows nothing of policies, modes or scopes beyond components and tiers, and nothing of the audit log: it returns facts.
"""
