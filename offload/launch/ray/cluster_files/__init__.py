"""Files that bring up the cluster which a plan recommends: Ray's own cluster launcher on AWS, Kubernetes, your own hosts.

Each kind is a pure function of what was planned and what is installed here; the same plan gives the same file, byte for
byte. Where it stops: nothing is started, and no file holds a secret. The commands that do the rest stand in each file's head.
"""
