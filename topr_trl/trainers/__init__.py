"""Trainers, and the modules that they share."""
