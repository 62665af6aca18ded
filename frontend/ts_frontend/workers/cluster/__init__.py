"""Workers on other machines, where Ray places them: their resources, the way to Ray, and the place they connect to."""
