"""Experimental: may change without notice, because it builds on TRL's experimental trainer."""
