"""The draft head and all that is done with it: fit, decode, evaluate, export."""
