"""Trained drafting heads as torch modules: one definition for training and for drafting.

A head never touches pages, masks or batches: it gets an `Attend`, and whoever runs it (a proposer over paged keys, a
trainer over packed documents, a test over a plain mask) decides what a row sees.
"""
