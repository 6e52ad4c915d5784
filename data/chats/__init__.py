"""Chats: read, mended, split, rendered to tokens and a mask, looked at."""
