"""The commands of `kvpolicy`, a file each; none imports PyTorch before it runs."""
