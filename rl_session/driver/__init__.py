"""The driver's side of one policy: who owns it, what mode it is in, and how a transition is asked for and recorded.

    run         what all participants of a run share: log, host pool, counters, defaults
    ownership   one owner at a time: tokens, found through context variables
    interrupts  Ctrl-C waits until a transition has ended
    callsite    where in the user's code a scope was opened
    control     modes, the stack of scopes, transitions, calls
    journal     how transitions, calls and warnings become events
    handles     the calls legal in each mode, as protocols and as objects

Knows nothing of how bytes move: it asks a worker group and reads replies.
"""
