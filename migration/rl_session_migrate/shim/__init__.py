"""The legacy API over the engine of rl_session: loops that call it run as they are, and may be migrated block by block.

Knows nothing of source code; that is the codemod's.
"""
