// Package frozen opens a program so that what is executed is what was hashed.
package frozen
