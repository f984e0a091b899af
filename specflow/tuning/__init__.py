"""Tuning: which drafting method at which length, found by measuring little and predicting the rest."""
