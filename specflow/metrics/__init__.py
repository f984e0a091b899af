"""The one definition of every number that a report prints; `docs/metrics.md` maps the names to other tools' names."""
