"""One rank of a policy, and groups of ranks with one contract.

    batch        what a batch must be
    shares       who gets which rows, and results back in order
    parallel     a model spread over ranks: FSDP2, DDP, a function
    ranks        what ranks tell each other; failing together
    gradients    gradients of ranks made one
    compute      logprobs, top-k, scores, values
    train_step   gradients and one optimizer step
    reference    the reference model: a copy swapped in, a module of its own, or an adapter switched off
    checkpoint   files, verified and atomic
    spec         what a rank is made of
    trainer      training: open steps, live gradients, steps that can be undone
    keeper       weights and checkpoints, from whichever tier holds the bytes
    worker       one rank: module, optimizer, engine; decides and carries out transitions
    group        how the driver talks to ranks: one reply each, ok, failed or lost

Knows nothing of scopes, sessions or the audit log: facts are returned.
"""
