"""Speculative decoding whose draft model runs at the precision it shipped with."""
