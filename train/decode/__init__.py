"""Drafting and verifying: lossless speculative decoding with a draft head."""
