"""Drafts of a target: training, trees, decoding, replay and export."""
