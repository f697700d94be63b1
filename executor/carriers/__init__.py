"""Where roles live, and how they are called: in this process, or in processes of this machine."""
