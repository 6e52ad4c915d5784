"""The target's own replies to the chats' questions."""
