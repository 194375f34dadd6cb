"""The models of a replica, and how a new version of one replaces the old one."""
