"""Runs a rewritten artifact by continuous batching: requests enter, tokens and outputs leave.

Read in this order: config, request, pages, states, capacity, scheduler, batch, runner, generation,
processors, sampler, text, stream, engine.
"""
