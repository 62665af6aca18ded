"""The operator's console: its pages, and what they show, sampled while somebody watches"""
