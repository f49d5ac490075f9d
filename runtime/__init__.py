"""Runs a rewritten artifact by continuous batching: requests enter, tokens and outputs leave.

Read in this order: config; request, output and sampling_params; pages, states and capacity;
scheduler, batch, runner and sampler (with processors); loop, where these meet in one step; engine,
the public surface, with what turns calls into requests (factory, prompts, generation_config,
schedules) and steps into results (stream, text, drop_in).
"""
