"""What the tables of a decode step hold, column by column; see `specflow.engine.decode_books`."""

# Of every request, int64, and float32.
STATE = ("num_tokens", "num_drafts", "rounds", "seeds", "limits", "speculates", "top_k")
FLOATS = ("temperature", "top_p", "min_p")
COUNTS = 5  # of a result, before its tokens: emitted, accepted, verified drafts, next drafts, dropped drafts
