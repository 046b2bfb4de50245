"""Programs that verify Quire with faults. They are for developers and not in any wheel.

driver      makes plans by hand for one worker engine
sim         runs the scheduler core in simulations with faults, and checks its promises
planted     bugs in the core that the simulator must find
mutation    small changes to the core that some check must detect
chaos       kills, freezes, attacks and overloads running services
oracle      the tokens that transformers computes
commands    the command-line commands
"""
