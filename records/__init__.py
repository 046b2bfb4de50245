"""Programs that read the flight record of a scheduler.

rules       checks plans and answers against the rules of the plan protocol
"""
