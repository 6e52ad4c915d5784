"""The trained head and the engines that serve it: export, heads of others, checks."""
