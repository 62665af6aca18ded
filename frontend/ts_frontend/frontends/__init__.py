"""Several frontends behind one address: the lead and its siblings, and the workers that they lend each other"""
