"""What breaks a run from outside: damaged data, kills, signals, full disks, lost ranks."""
