//go:build !linux

package reclog

import (
	"errors"
	"os"
)

func setAside(*os.File, int64, int64) error { return errors.ErrUnsupported }
