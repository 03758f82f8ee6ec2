"""Drafters: guesses at how an answer goes on, which a verify step checks. They never change an answer."""
