"""HTTP: the routes of a replica, the bodies they read and the errors they answer with."""
