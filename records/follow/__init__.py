"""Send what a run writes to a tracker."""
