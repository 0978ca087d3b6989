"""Files that bring up the cluster of a plan: with Ray's own cluster launcher on AWS, on Kubernetes, or on your own hosts.

Each kind is a pure function of the plan and the installed versions; the same plan gives the same file, byte for byte. Where it stops:
nothing is started, and no file holds a secret. The head of each file has the commands for the rest.
"""
