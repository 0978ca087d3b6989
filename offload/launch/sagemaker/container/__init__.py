"""What runs in a job's containers: the hosts meet, install, start Ray, train on the head, and end together."""
