"""Prompts: the bundled ones, any JSONL file, and the public benchmarks by hub id or local file."""
