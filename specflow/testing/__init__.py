"""The conformance kit: what a proposer's or sampler's own tests call.

`oracle` and `noise` proposers reach full acceptance and full rejection at will; the checks in `conformance` are the
ones the built-in methods have to pass.
"""
