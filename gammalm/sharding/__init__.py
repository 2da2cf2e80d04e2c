"""Where arrays live: the device mesh, the table from logical to mesh axes, what is known of each kind of device."""
