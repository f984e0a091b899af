"""Other engines: what a composition becomes there, and how it is run there."""
