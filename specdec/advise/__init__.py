"""Advice: how well drafts would serve a target, before anything is deployed."""
