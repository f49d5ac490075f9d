"""What the recurrent operators share: sequences of a packed row in, states of a pool in and out.

`states` reads and writes slots of a pool; `sequences` splits a packed row into a batched one-token
step and chunks; `delta` and `linear` are the two chunked forms; `naive` is the loop that every
oracle runs its recurrence in.
"""
