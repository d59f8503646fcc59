"""``zenflow bench``: measurements that end in a report; one module for each, helpers beside them."""
