"""Hidden states of the target, captured during normal decoding and kept as files."""
