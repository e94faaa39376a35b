"""Trainers, and modules that several trainers share."""
