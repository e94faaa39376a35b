"""The trainers, and what they share."""
