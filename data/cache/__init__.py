"""The feature cache on disk: its files, how they are read, verified and repaired."""
