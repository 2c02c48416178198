"""Figures of the book, one module a chapter."""
