"""Trainers of others, Ray's actors, and functions as scripts."""
