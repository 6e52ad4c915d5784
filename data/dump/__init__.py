"""From chats and a target to a feature cache."""
