"""Rollouts: calls that name no version, divided between two versions of a model, and the verdict on the new one."""
