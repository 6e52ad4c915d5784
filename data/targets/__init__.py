"""The frozen model: loaded, fingerprinted, its output head read, its features computed."""
