"""Chats: the template of a model folder."""
